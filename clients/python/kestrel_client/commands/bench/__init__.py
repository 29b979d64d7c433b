"""``bench``: load of a server in stages, until it is overloaded; results as text, JSON and an HTML report.

``sending`` sends the requests and measures, in one or several processes. ``reporting`` stores, draws and compares
results. A program makes load with ``open_fleet``, whose stages return a Tally and the client's health:

    connect = partial(AsyncKestrelClient, "127.0.0.1:50051")
    plan = ClientPlan(connect, 64, Mix({"query": 1.0}, ["How many?"], ["car"]), [image])
    with open_fleet(plan, processes=1) as fleet:
        tally, health = fleet.run(Stage("closed", level=64, window_s=10.0))
    print(tally.ended / 10.0, tally.ttft.percentile(50))
"""
