"""The command line: arguments in, core called, tables and JSON out."""
