"""How a model runs on many ranks: mesh, sharding, gradients, checkpoints, pipeline."""
