"""The least logit that a row's filters keep."""
