"""Captum adapter: K-way attributions from Captum attributors."""
