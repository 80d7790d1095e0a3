"""Looking into models: comparisons of their parts, and what was learned."""
