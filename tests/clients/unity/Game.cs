// A console in the place of Unity's player: it calls the messages of the agents as the engine does, by name, on one thread.
//
//     game.exe --url URL --matches N [--agents N] [--period N] [--wait] [--frames]
//
// --wait: waitForActions. --frames: prints the number of each frame, and sleeps for a millisecond in each.
using System;
using System.Collections.Generic;
using System.Globalization;
using System.Reflection;
using System.Threading;
using UnityEngine;

static class Game
{
    static int Main(string[] arguments)
    {
        string url = "";
        int matches = 1, count = 1, period = 1;
        bool wait = false, frames = false;
        for (int i = 0; i < arguments.Length; i++)
        {
            switch (arguments[i])
            {
                case "--url": url = arguments[++i]; break;
                case "--matches": matches = int.Parse(arguments[++i], CultureInfo.InvariantCulture); break;
                case "--agents": count = int.Parse(arguments[++i], CultureInfo.InvariantCulture); break;
                case "--period": period = int.Parse(arguments[++i], CultureInfo.InvariantCulture); break;
                case "--wait": wait = true; break;
                case "--frames": frames = true; break;
                default: Console.Error.WriteLine("unknown: " + arguments[i]); return 2;
            }
        }
        var agents = new List<CartPoleAgent>();
        for (int i = 0; i < count; i++)
        {
            var agent = new CartPoleAgent { url = url, decisionPeriod = period, waitForActions = wait, seed = i, pole = new Transform() };
            agents.Add(agent);
            Send(agent, "OnEnable");
        }
        for (int frame = 1; !agents.TrueForAll(agent => agent.Matches >= matches); frame++)
        {
            if (frames) Debug.Log("frame " + frame);
            foreach (CartPoleAgent agent in agents)
                if (agent.Matches < matches) Send(agent, "FixedUpdate");
            if (frames || !wait) Thread.Sleep(1);
        }
        foreach (CartPoleAgent agent in agents) Send(agent, "OnApplicationQuit");
        foreach (CartPoleAgent agent in agents) Send(agent, "OnDisable");
        return 0;
    }

    static void Send(MonoBehaviour to, string message)
    {
        MethodInfo method = to.GetType().GetMethod(message, BindingFlags.Instance | BindingFlags.Public | BindingFlags.NonPublic);
        method.Invoke(to, null);
    }
}
