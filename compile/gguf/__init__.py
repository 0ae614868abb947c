"""Models from GGUF files, as llama.cpp's tools write them."""
