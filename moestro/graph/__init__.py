"""The operations and collectives of one training step: counted from shapes, or traced from a real step."""
