"""Adapters (LoRA): which there are, whether they fit the model, and which of them are loaded.

``names`` maps every form of an adapter's tensor names to the modules that they change. ``targets`` knows the shapes of
these modules. ``files`` finds an adapter's files and checks and reads them. ``stored`` reads these files, and bounds
what they may say. ``library`` keeps loaded adapters.
"""
