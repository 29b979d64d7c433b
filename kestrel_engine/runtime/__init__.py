"""The runtimes: what computes a step, behind one protocol: plain torch, and the GPU runtime."""
