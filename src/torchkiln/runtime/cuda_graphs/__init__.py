"""CUDA graphs of compiled graphs: calls that are captured once and replayed (``mode="reduce-overhead"``).

``replays.py`` decides what is captured and which capture a call replays, ``captured_call.py`` is one capture with the
memory it reads and writes, ``device.py`` is the card's side, which tests emulate.
"""
