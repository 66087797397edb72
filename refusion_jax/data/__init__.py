"""What models are trained on: sources of examples, tokenised data sets, batches."""
