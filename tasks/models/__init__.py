"""Where models and data sets come from: synthetic, local folders, the Hugging Face hub."""
