"""The confinement of processes that work on untrusted bytes: image decoders and the compiler of constraints.

A process imports, opens and allocates everything, then confines itself (``own_confinement.py``), and only then reads
the first untrusted byte. This package imports nothing but the standard library.
"""

MODES = ("auto", "require", "off")
"""Values of the setting ``confine``: all that the kernel offers; the same, and Landlock and seccomp must be there;
nothing."""
