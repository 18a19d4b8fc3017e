"""How good concept maps are: patch flipping and the scores of section 5 (Notes D–G)."""
