"""The CPU driver: native code, a thread team, memory of this machine.

``host`` and ``threads`` need no native module, so the builder can ask what this machine is; ``driver`` does.
"""
