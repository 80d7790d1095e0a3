"""Using a trained model: generation."""
