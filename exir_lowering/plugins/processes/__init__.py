"""Processes of our own, in which plug-ins work: backends on partitions, and engines on the programs of others.

`workers` starts, keeps and ends them, `server` is what they are forked from, and `messages` are what travels.
"""
