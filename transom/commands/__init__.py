"""The subcommands of the `transom` command: one module each, with its parser and its code."""
