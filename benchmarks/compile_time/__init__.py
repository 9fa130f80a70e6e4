"""How long compiling takes: the first call beside other backends, with empty and with filled caches, and our stages."""
