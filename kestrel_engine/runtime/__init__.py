"""The runtimes: what computes a step, behind one protocol: plain torch, the GPU runtime, and a fake without torch."""
