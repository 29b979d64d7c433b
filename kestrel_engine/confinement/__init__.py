"""The confinement of processes that work on untrusted bytes: image decoders and the compiler of constraints.

Such a process imports everything, opens everything and allocates its links. Then it confines itself (``steps.py``), and
only then it reads the first untrusted byte. This package imports nothing but the standard library.
"""

MODES = ("auto", "require", "off")
"""Values of the setting ``confine``: all that the kernel offers; the same, and Landlock and seccomp must be there;
nothing."""
