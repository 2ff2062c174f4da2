"""The training run: configuration, objectives, data, optimizer, metrics and the loop."""
