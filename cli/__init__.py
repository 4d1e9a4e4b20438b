"""What a person types: the `kalmanhead` command."""
