"""How good concept maps are: patch flipping, total relevance, separability, peakness (section 5, Notes D–G)."""
