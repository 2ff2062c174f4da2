"""Pipeline parallelism: units, planner, schedules, checker, simulator and executor.

``units`` and ``layout`` place the model.  ``planner`` chooses a placement from ``cost``: hand-made
layouts are in ``baselines``, heads divided over ranks in ``head_layouts``, the choice among all in
``adahc``; ``rebalance`` moves shares of heads later, ``comparison`` sets planners side by side.
``schedules`` orders the compute actions, fitted to costs in ``fitted`` by ``building_block`` and
``interleaving``; ``program`` times such orders.  ``lowering`` completes them to the static lists of
``actions``, ``checker`` proves the lists, ``simulate`` times and weighs them, ``timeline`` and
``drawing`` draw them.  ``executor`` runs them over ``links``, driving the modules that ``stage``
describes; ``measure`` turns what it recorded into costs.  Only ``links`` and ``executor`` use
torch.distributed; everything before them is plain Python for any number of ranks.
"""
