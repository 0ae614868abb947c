"""The commands of the command line: one module each, with HELP, EXAMPLES, `options(parser)` and `run(options)`."""
