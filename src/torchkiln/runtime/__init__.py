"""Running compiled graphs: native entry points, handles, memory."""
