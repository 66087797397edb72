"""The command lines: ``decode.py`` and ``refusion-decode``."""
