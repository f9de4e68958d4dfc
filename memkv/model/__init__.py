"""Language models: which are supported, how they are installed and loaded, and the seam to transformers."""
