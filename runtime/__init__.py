"""The replay runtime: read an engine, bind its buffers, replay one graph per step, decode text."""
