"""The papers behind Moestro: what each claims, what we implement of it, and how the claim reproduces.

`catalog` lists them, one file per paper reproduces it through Moestro's public API, and `results/` holds what each
file found when it was last run. Nothing here imports torch until a paper is run.
"""
