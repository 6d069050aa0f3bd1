using System;
using System.Threading.Tasks;

namespace Ludus
{
    /// <summary>
    /// The sessions of one agent, one after another, for a game that must not wait. Requests run on threads of the pool; Update takes
    /// their results. Independent of the engine: the caller passes the time. All members are for one thread, that of the frames.
    /// </summary>
    public sealed class AgentLoop : IDisposable
    {
        const double FirstPauseSeconds = 0.25, LongestPauseSeconds = 8;

        enum Request { None, Start, Tick, End }

        readonly LudusClient _client;
        readonly Func<LudusStart> _describe;
        LudusStart _about;       // of the next start; the same object again while it is unanswered, so that it counts once
        LudusSession _session;
        Task _pending;
        Request _request;
        byte[] _action;
        byte[] _last;            // body of the end that is due or under way
        bool _ticked;
        double _retryAt;
        bool _paused;            // until _retryAt, after a failure
        bool _repeating;         // no request has succeeded since a failure
        int _failures;           // since the last tick or end that succeeded
        int _losses;             // of sessions, likewise
        Task _closed;

        /// <param name="describe">Makes the settings of each session.</param>
        public AgentLoop(LudusClient client, Func<LudusStart> describe)
        {
            _client = client;
            _describe = describe;
        }

        /// <summary>A session is open, and its episode goes on.</summary>
        public bool Playing { get { return _session != null && _last == null; } }
        /// <summary>Decide may be called.</summary>
        public bool Ready { get { return Playing && _pending == null && !_paused; } }
        /// <summary>The open session has had a decision, which the next reward belongs to.</summary>
        public bool Ticked { get { return _session != null && _ticked; } }
        /// <summary>Why the last request failed, other than by its deadline; null after one that succeeded.</summary>
        public LudusException Error { get; private set; }
        /// <summary>Sessions that ended with their episode.</summary>
        public int Episodes { get; private set; }
        /// <summary>Sessions that the server no longer had.</summary>
        public int Lost { get; private set; }
        /// <summary>Ticks that missed their deadline.</summary>
        public int Missed { get; private set; }

        /// <summary>Take the result of the pending request, and make the next one that is due. Never blocks.</summary>
        /// <param name="now">Seconds of a clock that never goes back.</param>
        public void Update(double now)
        {
            if (_pending != null && !_pending.IsCompleted) return;
            if (_pending != null) Finish(now);
            if (now >= _retryAt) _paused = false;
            if (_pending != null || _paused || _closed != null) return;
            if (_session == null) Begin(Request.Start);
            else if (_last != null) Begin(Request.End);
        }

        /// <summary>Wait for the pending request, for games that run in step with the server. Does not wait for one that is repeated.</summary>
        public void Wait(double now)
        {
            if (_pending == null || _repeating) return;
            try { _pending.Wait(); }
            catch (AggregateException) { }  // Finish reports it
            Update(now);
        }

        /// <summary>Request an action for an observation: the body of a tick.</summary>
        public void Decide(byte[] body)
        {
            if (!Ready) throw new LudusException(0, "usage", "No session is ready for a decision.", "Check Ready.");
            _ticked = true;
            _request = Request.Tick;
            _pending = _session.TickAsync(body);
        }

        /// <summary>The reply that arrived since the last call, or null.</summary>
        public byte[] TakeAction()
        {
            byte[] action = _action;
            _action = null;
            return action;
        }

        /// <summary>End the episode with the body of the last step; a pending decision is dropped. The next session begins by itself.</summary>
        public void EndEpisode(byte[] body)
        {
            if (!Playing || !_ticked) return;  // the server has seen nothing of this episode: its session serves for the next one
            _action = null;
            _last = body;
        }

        /// <summary>End the open session in the background, and close the client.</summary>
        public void Dispose() { Close(); }

        /// <summary>The same; the task is complete when that is done.</summary>
        public Task Close()
        {
            if (_closed != null) return _closed;
            Task pending = _pending;
            LudusSession open = _session;
            bool ended = _request == Request.End;
            byte[] last = _last;
            _session = null;
            _pending = null;
            _last = null;
            LudusClient client = _client;
            _closed = Task.Run(() =>
            {
                try { if (pending != null) pending.Wait(); }
                catch (AggregateException) { }  // a tick that missed its deadline leaves the session open
                try
                {
                    var start = pending as Task<LudusSession>;
                    if (start != null && !start.IsFaulted) open = start.Result;
                    if (open != null && !ended) open.End(last);
                }
                catch (LudusException) { }  // the server ends it later
                if (open != null) open.Dispose();
                client.Dispose();
            });
            return _closed;
        }

        void Begin(Request request)
        {
            _request = request;
            if (request == Request.End)
            {
                _pending = _session.EndAsync(_last);
                return;
            }
            _about = _about ?? _describe();
            _pending = _client.StartAsync(_about);
        }

        void Finish(double now)
        {
            Task done = _pending;
            Request request = _request;
            _pending = null;
            _request = Request.None;
            if (done.IsFaulted)
            {
                Exception inner = done.Exception.InnerException;
                Fail(request, inner as LudusException ?? new LudusException(0, "client", inner.Message, "", inner), now);
                return;
            }
            Error = null;
            _repeating = false;
            if (request != Request.Start) _failures = _losses = 0;  // a server may start sessions and then lose them all
            switch (request)
            {
                case Request.Start:
                    _session = ((Task<LudusSession>)done).Result;
                    _about = null;
                    _ticked = false;
                    break;
                case Request.Tick:
                    if (_session.LastMissed) Missed++;
                    byte[] reply = ((Task<byte[]>)done).Result;
                    if (_last == null && reply.Length > 0) _action = reply;
                    break;
                case Request.End:
                    Episodes++;
                    Drop();
                    break;
            }
        }

        void Fail(Request request, LudusException error, double now)
        {
            if (error is LudusDeadlineMissed && request == Request.Tick)
            {
                Missed++;
                return;  // the session goes on
            }
            Error = error;
            if (error is LudusSessionLost)
            {
                Lost++;
                Drop();
                if (++_losses == 1) return;  // the server is there: a new session at once
            }
            bool unanswered = error is LudusUnreachable;
            if (request == Request.Start && !unanswered) _about = null;
            bool again = unanswered || error.Status == 429 || error.Status == 503;
            if (request == Request.End && !again) Drop();  // refused: repeating would not help
            var refused = error as LudusRefused;
            double pause = Math.Min(LongestPauseSeconds, FirstPauseSeconds * Math.Pow(2, Math.Min(_failures, 10)));
            _failures++;
            _paused = _repeating = true;
            _retryAt = now + (refused != null && refused.RetryAfterSeconds.HasValue ? refused.RetryAfterSeconds.Value : pause);
        }

        void Drop()
        {
            if (_session != null) _session.Dispose();
            _session = null;
            _last = null;
            _action = null;
        }
    }
}
