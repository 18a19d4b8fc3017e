"""Zennit adapter: K-way attributions from Zennit composites and attributors."""
