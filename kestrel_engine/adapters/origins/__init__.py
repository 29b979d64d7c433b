"""Where adapters come from: a folder, the hub, the tuning API. ``origins`` finds what a name means, ``disk`` keeps what
was downloaded, and ``staging`` bounds a download that runs."""
