"""One file for each family of models: its canonizer, its composite, and what `doctor` can suggest for it."""
