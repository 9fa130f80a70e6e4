"""What every pass over an FX graph needs: the pass manager, order, fake values, effects, aliasing and subgraphs."""
