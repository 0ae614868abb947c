"""The commands of the command line: one module each, with HELP, EXAMPLES, `add_options(parser)` and `run(options)`."""
