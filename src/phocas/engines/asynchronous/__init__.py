"""Training without waiting: policies that say what to do with a row that comes alone.

A policy is a frozen value, ``buffered:buffers=15``, and knows no clock and no process; the event
engine here gives it rows in the order of a virtual clock.
"""
