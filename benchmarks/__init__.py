"""What torchkiln is measured with. A package, since others may install one of this name."""
