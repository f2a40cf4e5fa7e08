"""State of a decode: K/V rows, convolution windows, delta states; append, checkpoint, commit, rollback, fork."""
