"""Linear layers over packed weights on the CPU: the same bits for any number of rows, fast for few and for many."""
