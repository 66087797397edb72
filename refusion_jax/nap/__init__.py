"""NAP (arXiv 2602.23225): how autoregressive a decoder really is."""
