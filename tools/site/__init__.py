"""Generate pages of the documentation site from the code.

``hook`` has the functions that mkdocs calls. ``public`` lists the public names. ``catalogue``
writes the pages of rules, attacks and commands. ``pictures`` draws the SVG pictures. ``sources``
adds pages whose files are outside of ``docs``.
"""
