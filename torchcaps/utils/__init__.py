"""What every part of the package shares: checks of arguments, files, processes, messages for missing extras."""
