"""The cache-write op of TensorRT engines: new K and V rows into a cache, in place."""
