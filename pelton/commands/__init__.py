"""The console commands: each module has HELP, add_arguments(parser) and execute(arguments) -> exit status."""
