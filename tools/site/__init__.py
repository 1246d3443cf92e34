"""The documentation site: pages that are made from the code when it is built.

``hook`` is what mkdocs calls. ``public`` lists the public names, ``catalogue`` writes the pages of
rules, attacks and commands, ``pictures`` draws, ``sources`` brings in pages that lie elsewhere.
"""
