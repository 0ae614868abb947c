"""The cache write of engines that torch compiles for a GPU: keys and values of a pass to their slots, in place."""
