"""Tests of torchkiln. A package, since other packages install one of this name, which would be found first."""
