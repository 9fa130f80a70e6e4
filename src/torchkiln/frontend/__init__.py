"""From a captured graph to functional ATen graphs: the call of AOTAutograd and the decompositions it uses."""
