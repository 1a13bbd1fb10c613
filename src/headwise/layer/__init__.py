"""The attention layer: four Linears around `attend`, its heads as objects, and layers from elsewhere."""
