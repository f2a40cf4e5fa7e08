"""Training: the demo corpus and language model, drafters, losses and calibration."""
