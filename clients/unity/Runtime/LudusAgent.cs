using System;
using UnityEngine;

namespace Ludus
{
    /// <summary>
    /// An agent of the scene that a Ludus server trains or plays. Derive from it, and implement Observe and Act.
    ///
    /// Every decisionPeriod physics steps it sends an observation with the reward since the one before. Requests run on other threads;
    /// everything here, also the methods of derived classes, runs in FixedUpdate on the main thread. The server may come, go and
    /// restart: the agent connects again and begins a new session.
    /// </summary>
    public abstract class LudusAgent : MonoBehaviour
    {
        [Tooltip("Address of `ludus train` or `ludus serve`. The environment variable LUDUS_URL has priority.")]
        public string url = "http://127.0.0.1:8000";

        [Tooltip("Name of the model, if the server has several.")]
        public string model = "";

        [Tooltip("Common id of all sessions of one match; empty: a match of its own.")]
        public string match = "";

        [Tooltip("Side of the match that this agent plays.")]
        public string side = "";

        [Tooltip("0: the most probable actions; 1: as in training; below 0: as the server is configured.")]
        public float temperature = -1;

        [Min(1), Tooltip("Physics steps from one decision to the next.")]
        public int decisionPeriod = 5;

        [Tooltip("Call Act in every physics step with the last action, and not only when a new one arrives.")]
        public bool actBetweenDecisions = true;

        [Min(1), Tooltip("Time in milliseconds after which a decision is given up. The last action stays in force.")]
        public int deadlineMs = 5000;

        [Tooltip("Stop the frame until the action is there. For training: every action belongs to the physics step that was observed.")]
        public bool waitForActions;

        const int QuitMilliseconds = 1000;

        readonly RawWriter _writer = new RawWriter();
        AgentLoop _loop;
        byte[] _action;
        float _reward;
        int _stepsToDecision;
        bool _begin;
        LudusException _reported;

        /// <summary>Token of the server. It is not saved with the scene; null: the environment variable LUDUS_TOKEN.</summary>
        public string Token { get; set; }
        /// <summary>Whether a session is open.</summary>
        public bool Connected { get { return _loop != null && _loop.Playing; } }
        /// <summary>Episodes of which the server got the end.</summary>
        public int Episodes { get { return _loop == null ? 0 : _loop.Episodes; } }
        /// <summary>Decisions that missed their deadline.</summary>
        public int Missed { get { return _loop == null ? 0 : _loop.Missed; } }
        /// <summary>Physics steps in which a decision was due, but the one before was not answered yet.</summary>
        public int LateSteps { get; private set; }

        /// <summary>Write the observation, in the order of GET /spec.</summary>
        protected abstract void Observe(RawWriter observation);

        /// <summary>Read the action, in the order of GET /spec, and apply it.</summary>
        protected abstract void Act(RawReader action);

        /// <summary>Which options are allowed in the next decision; null: all.</summary>
        protected virtual bool[] ActionMask() { return null; }

        /// <summary>Reset the scene. Called before the first step of every episode.</summary>
        protected virtual void OnEpisodeBegin() { }

        /// <summary>A request failed (the error), or succeeded again (null).</summary>
        protected virtual void OnConnectionChanged(LudusException error)
        {
            if (error == null) Debug.Log(name + ": connected to " + url);
            else Debug.LogWarning(name + ": " + error);
        }

        /// <summary>Add to the reward of the last action.</summary>
        public void AddReward(float reward)
        {
            if (!_begin) _reward += reward;
        }

        /// <summary>End the episode in a terminal state: the agent has won, lost or died.</summary>
        public void EndEpisode() { Finish(true); }

        /// <summary>End the episode although it could go on, for example at a time limit.</summary>
        public void InterruptEpisode() { Finish(false); }

        protected virtual void OnEnable()
        {
            string address = Environment.GetEnvironmentVariable("LUDUS_URL");
            if (!string.IsNullOrEmpty(address)) url = address;
            string token = Token ?? Environment.GetEnvironmentVariable("LUDUS_TOKEN");
            var options = new LudusOptions { Token = string.IsNullOrEmpty(token) ? null : token, DeadlineMs = deadlineMs };
            _loop = new AgentLoop(new LudusClient(url, options), Describe);
            _begin = true;
        }

        protected virtual void OnDisable()
        {
            if (_loop != null) _loop.Dispose();
            _loop = null;
        }

        protected virtual void OnApplicationQuit()
        {
            if (_loop != null) _loop.Close().Wait(QuitMilliseconds);  // the threads of the pool end with the player
        }

        protected virtual void FixedUpdate()
        {
            if (_loop == null) return;
            if (_begin) BeginEpisode();
            _loop.Update(Time.realtimeSinceStartup);
            if (waitForActions)
            {
                _loop.Wait(Time.realtimeSinceStartup);  // for the end of the last episode,
                _loop.Wait(Time.realtimeSinceStartup);  // and for the start of this one
            }
            if (_stepsToDecision > 0) _stepsToDecision--;
            if (_stepsToDecision == 0) DecideIfReady();
            if (waitForActions) _loop.Wait(Time.realtimeSinceStartup);
            Report();
            byte[] fresh = _loop.TakeAction();
            if (fresh != null) _action = fresh;
            if (_action != null && (fresh != null || actBetweenDecisions)) Act(new RawReader(_action));
        }

        LudusStart Describe()
        {
            return new LudusStart
            {
                Model = model.Length > 0 ? model : null,
                Match = match.Length > 0 ? match : null,
                Side = side.Length > 0 ? side : null,
                Temperature = temperature >= 0 ? temperature : (double?)null,
                Body = RawWriter.Start,
            };
        }

        void BeginEpisode()
        {
            _begin = false;
            _action = null;
            _reward = 0;
            _stepsToDecision = 0;
            OnEpisodeBegin();
        }

        void DecideIfReady()
        {
            if (!_loop.Ready)
            {
                if (_loop.Playing) LateSteps++;
                return;
            }
            _writer.Begin(_loop.Ticked ? _reward : 0, mask: ActionMask());
            Observe(_writer);
            _loop.Decide(_writer.ToArray());
            _reward = 0;
            _stepsToDecision = decisionPeriod;
        }

        void Finish(bool terminated)
        {
            if (_loop == null || _begin) return;
            _begin = true;
            if (!_loop.Playing) return;
            _writer.Begin(_reward, terminated, !terminated);
            Observe(_writer);
            _loop.EndEpisode(_writer.ToArray());
        }

        void Report()
        {
            LudusException error = _loop.Error;
            if (error == _reported || (error != null && _reported != null && error.Error == _reported.Error)) return;
            _reported = error;
            OnConnectionChanged(error);
        }
    }
}
