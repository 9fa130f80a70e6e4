"""Recording a program's compilations: ``explain``, ``KILN_TRACE``, ``kiln replay``, and the summary in the terminal."""
