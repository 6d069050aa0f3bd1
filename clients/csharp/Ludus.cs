// Ludus client for games (docs/protocol.md) in one file. Needs only C# 7.3 and .NET Standard 2.0.
//
//     var client = new LudusClient("http://127.0.0.1:8000", new LudusOptions {
//         DeadlineMs = 30, Fallback = Fallback.Repeat, Default = new byte[8] });
//     using (LudusSession session = client.Start()) {
//         while (playing) Apply(session.Tick(Observe()));    // or TickAsync: check the Task in every frame
//         session.End();
//     }
//
// A tick has a deadline. If it is missed, the game gets the fallback and continues; session.LastMissed and session.Missed report it,
// and the next tick synchronises with the server again. Start and End retry until TimeoutMs, then throw. Every request is numbered: a
// request that is sent twice counts once, and a reply is never mistaken for that of another request.
//
//     LudusException                   Status, Error (error word for programs), Hint
//     ├── LudusRefused                 the server refused
//     │   └── LudusSessionLost         the server no longer has this session: Start a new one
//     └── LudusUnreachable             no answer; the request may or may not have counted
//         └── LudusDeadlineMissed      a late tick without a fallback. The session continues.
//
// Use a session from one thread at a time, a client from any number of threads.

using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.IO;
using System.Net;
using System.Net.Security;
using System.Net.Sockets;
using System.Security.Authentication;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace Ludus
{
    /// <summary>Result of a Tick that misses its deadline.</summary>
    public enum Fallback
    {
        /// <summary>None: throw LudusDeadlineMissed.</summary>
        Error,
        /// <summary>The last reply to a tick of this session; before the first reply Default, if set, else as Error.</summary>
        Repeat,
        /// <summary>The bytes in Default.</summary>
        Default,
    }

    public sealed class LudusOptions
    {
        public string Token;
        /// <summary>For each Start, End and Spec, including retries.</summary>
        public int TimeoutMs = 10000;
        /// <summary>For a Tick, including retries.</summary>
        public int DeadlineMs = 10000;
        public Fallback Fallback = Fallback.Error;
        public byte[] Default;
        /// <summary>Number of retries after a broken connection.</summary>
        public int Retries = 2;
        public int MaxReplyBytes = 64 << 20;
        /// <summary>Only for https. null: the trust store of the system.</summary>
        public RemoteCertificateValidationCallback CheckCertificate;
    }

    /// <summary>
    /// Optional settings of a start. After LudusUnreachable, a Start with the same object repeats the same request, which counts
    /// once.
    /// </summary>
    public sealed class LudusStart
    {
        internal string UnansweredId;
        internal long UnansweredNumber;

        /// <summary>New for every match. null: a new GUID.</summary>
        public string Session;
        /// <summary>Common id of several sessions of one match.</summary>
        public string Match;
        /// <summary>Side of the match that this session plays: 0, 1, or a name of the training's self_play.sides.</summary>
        public string Side;
        public string Model;
        public long? Version;
        public double? Temperature;
        public byte[] Body;
    }

    public class LudusException : Exception
    {
        public int Status { get; }
        public string Error { get; }
        public string Hint { get; }

        public LudusException(int status, string error, string message, string hint = "", Exception inner = null)
            : base(message, inner)
        {
            Status = status;
            Error = error;
            Hint = hint;
        }

        public override string ToString()
        {
            return (Status > 0 ? Status + " " : "") + Error + ": " + Message + (Hint.Length > 0 ? " " + Hint : "");
        }
    }

    public class LudusRefused : LudusException
    {
        /// <summary>Set if a retry may help.</summary>
        public double? RetryAfterSeconds { get; }

        public LudusRefused(int status, string error, string message, string hint, double? retryAfterSeconds)
            : base(status, error, message, hint)
        {
            RetryAfterSeconds = retryAfterSeconds;
        }
    }

    public sealed class LudusSessionLost : LudusRefused
    {
        public LudusSessionLost(int status, string error, string message, string hint)
            : base(status, error, message, hint, null) { }
    }

    public class LudusUnreachable : LudusException
    {
        public LudusUnreachable(string error, string message, string hint, Exception inner)
            : base(0, error, message, hint, inner) { }
    }

    public sealed class LudusDeadlineMissed : LudusUnreachable
    {
        public LudusDeadlineMissed(string message, string hint, Exception inner) : base("deadline", message, hint, inner) { }
    }

    /// <summary>Client of one server. Keeps a few connections of ended sessions for new ones.</summary>
    public sealed class LudusClient : IDisposable
    {
        const int KeptConnections = 4;
        static long _starts = -1;

        internal readonly LudusOptions Options;
        internal readonly Server Server;
        readonly List<Connection> _idle = new List<Connection>();
        bool _disposed;

        public LudusClient(string url = "http://127.0.0.1:8000", LudusOptions options = null)
        {
            Options = options ?? new LudusOptions();
            if (Options.TimeoutMs <= 0 || Options.DeadlineMs <= 0 || Options.Retries < 0 || Options.MaxReplyBytes <= 0)
                throw new LudusException(0, "usage", "An option is out of range.", "Times and sizes are above 0.");
            if (Options.Fallback == Fallback.Default && Options.Default == null)
                throw new LudusException(0, "usage", "Fallback.Default without a Default.", "Set Default to the bytes of an action.");
            Server = new Server(url, Options);
        }

        /// <summary>Begin a session. Blocks for at most TimeoutMs.</summary>
        public LudusSession Start(LudusStart about = null)
        {
            about = about ?? new LudusStart();
            string id = about.UnansweredId ?? about.Session ?? Guid.NewGuid().ToString("N");
            // Every start has its own number: a new start is never mistaken for the retry of an earlier one with the same id.
            long number = about.UnansweredId != null ? about.UnansweredNumber : Interlocked.Increment(ref _starts);
            about.UnansweredId = null;
            var session = new LudusSession(this, about, id, number);
            try
            {
                session.Begin();
                return session;
            }
            catch (LudusException error)
            {
                session.Dispose();
                if (error is LudusUnreachable)
                {
                    about.UnansweredId = id;
                    about.UnansweredNumber = number;
                }
                throw;
            }
        }

        public Task<LudusSession> StartAsync(LudusStart about = null)
        {
            return Task.Run(() => Start(about));
        }

        /// <summary>Get the JSON of GET /spec.</summary>
        public string Spec()
        {
            var clock = new Clock(Options.TimeoutMs);
            for (int failures = 0; ; )
            {
                Connection connection = null;
                try
                {
                    connection = Take(clock);
                    Reply reply = connection.Ask(Server.Get("/spec"), clock);
                    if (reply.Close) connection.Dispose();
                    else Keep(connection);
                    if (reply.Status != 200) throw reply.Refused();
                    return Encoding.UTF8.GetString(reply.Body);
                }
                catch (IOException error)
                {
                    if (connection != null) connection.Dispose();
                    if (++failures > Options.Retries || clock.Over) throw Server.Unreachable(error, Options.TimeoutMs);
                    clock.Sleep(200 * (failures - 1));
                }
            }
        }

        /// <summary>Close idle connections. Open sessions stay open, here and on the server.</summary>
        public void Dispose()
        {
            lock (_idle)
            {
                _disposed = true;
                foreach (Connection kept in _idle) kept.Dispose();
                _idle.Clear();
            }
        }

        /// <summary>Return an idle or new connection. Throws IOException.</summary>
        internal Connection Take(Clock clock)
        {
            while (true)
            {
                Connection kept = null;
                lock (_idle)
                {
                    if (_idle.Count > 0)
                    {
                        kept = _idle[_idle.Count - 1];
                        _idle.RemoveAt(_idle.Count - 1);
                    }
                }
                if (kept == null) return Server.Connect(clock);
                if (kept.Usable) return kept;
                kept.Dispose();
            }
        }

        internal void Keep(Connection connection)
        {
            lock (_idle)
            {
                if (!_disposed && _idle.Count < KeptConnections)
                {
                    _idle.Add(connection);
                    return;
                }
            }
            connection.Dispose();
        }
    }

    /// <summary>One match with its own connection. Not thread-safe.</summary>
    public sealed class LudusSession : IDisposable
    {
        const int RetryPauseMs = 200;
        const int BusyPauseMs = 2;
        const int MaxBusyPauseMs = 20;

        readonly LudusClient _client;
        readonly LudusStart _about;
        readonly string _head;
        Connection _connection;
        long _last;      // number of the last request known to have counted; the next one is 1 higher
        bool _unsure;    // an attempt had no answer and may still arrive, after any number of other requests: 409 corrects _last
        int _asking;
        byte[] _good;    // the last reply to a tick

        public string Id { get; }
        /// <summary>Body of the reply to the start.</summary>
        public byte[] Started { get; private set; } = new byte[0];
        public Fallback Fallback { get; set; }
        public byte[] Default { get; set; }
        public int DeadlineMs { get; set; }
        /// <summary>Number of ticks that were not answered in time.</summary>
        public int Missed { get; private set; }
        /// <summary>Whether the last tick was one of them, so that it returned the fallback.</summary>
        public bool LastMissed { get; private set; }
        public bool Ended { get; private set; }

        internal LudusSession(LudusClient client, LudusStart about, string id, long number)
        {
            _client = client;
            _about = about;
            _last = number - 1;
            Id = id;
            Fallback = client.Options.Fallback;
            Default = client.Options.Default;
            DeadlineMs = client.Options.DeadlineMs;
            _head = client.Server.StepHead + "Ludus-Session: " + Header.Checked("session", Id, 256) + "\r\n";
        }

        internal void Begin()
        {
            var extra = new StringBuilder();
            if (_about.Match != null) extra.Append("Ludus-Match: ").Append(Header.Checked("match", _about.Match, 256)).Append("\r\n");
            if (_about.Side != null) extra.Append("Ludus-Side: ").Append(Header.Checked("side", _about.Side, 256)).Append("\r\n");
            if (_about.Model != null) extra.Append("Ludus-Model: ").Append(Header.Checked("model", _about.Model, 256)).Append("\r\n");
            if (_about.Version.HasValue)
                extra.Append("Ludus-Version: ").Append(_about.Version.Value.ToString(CultureInfo.InvariantCulture)).Append("\r\n");
            if (_about.Temperature.HasValue)
                extra.Append("Ludus-Temperature: ").Append(_about.Temperature.Value.ToString("R", CultureInfo.InvariantCulture)).Append("\r\n");
            Started = Insist("start", _about.Body, extra.ToString());
        }

        /// <summary>Request the next action. Blocks for at most the deadline (0: DeadlineMs).</summary>
        public byte[] Tick(byte[] body, int deadlineMs = 0)
        {
            Enter();
            try
            {
                return TickNow(body, deadlineMs > 0 ? deadlineMs : DeadlineMs);
            }
            finally
            {
                Volatile.Write(ref _asking, 0);
            }
        }

        /// <summary>The same on a thread of the pool. Do not modify the body or make another request before it has finished.</summary>
        public Task<byte[]> TickAsync(byte[] body, int deadlineMs = 0)
        {
            return Task.Run(() => Tick(body, deadlineMs));
        }

        /// <summary>End the session. Blocks for at most TimeoutMs of the client. May be repeated after LudusUnreachable, and counts once.</summary>
        public byte[] End(byte[] body = null)
        {
            Enter();
            try
            {
                byte[] reply = Insist("end", body, "");
                Ended = true;
                if (_connection != null) _client.Keep(_connection);
                _connection = null;
                return reply;
            }
            finally
            {
                Volatile.Write(ref _asking, 0);
            }
        }

        public Task<byte[]> EndAsync(byte[] body = null)
        {
            return Task.Run(() => End(body));
        }

        /// <summary>Close the connection. The server ends a session without End after a minute of silence.</summary>
        public void Dispose()
        {
            Drop();
        }

        void Enter()
        {
            if (Ended) throw new LudusException(0, "usage", "The session " + Id + " has ended.", "Start a new one.");
            if (Interlocked.Exchange(ref _asking, 1) != 0)
                throw new LudusException(0, "usage", "The request before is not answered yet.", "Wait for each reply.");
        }

        byte[] TickNow(byte[] body, int deadlineMs)
        {
            var clock = new Clock(deadlineMs);
            LastMissed = false;
            LudusException why;
            try
            {
                Reply reply = Ask("tick", body, "", clock);
                if (reply.Status == 200)
                {
                    _good = reply.Body;
                    return (byte[])reply.Body.Clone();
                }
                if (!reply.NotNow) throw reply.Refused();
                why = reply.Refused();
            }
            catch (IOException error)
            {
                why = _client.Server.Unreachable(error, deadlineMs);
                if (clock.Over) why = new LudusDeadlineMissed(why.Message, "The session goes on.", error);
            }
            LastMissed = true;
            Missed++;
            byte[] instead = Fallback == Fallback.Error ? null : Fallback == Fallback.Repeat ? _good ?? Default : Default;
            if (instead == null) throw why;
            return (byte[])instead.Clone();
        }

        byte[] Insist(string kind, byte[] body, string extra)
        {
            int timeoutMs = _client.Options.TimeoutMs;
            try
            {
                Reply reply = Ask(kind, body, extra, new Clock(timeoutMs));
                if (reply.Status == 200) return reply.Body;
                throw reply.Refused();
            }
            catch (IOException error)
            {
                throw _client.Server.Unreachable(error, timeoutMs);
            }
        }

        /// <summary>Send one request, with retries, and return its reply, which may be a refusal. Throws IOException.</summary>
        Reply Ask(string kind, byte[] body, string extra, Clock clock)
        {
            body = body ?? new byte[0];
            int failures = 0, rounds = 0;
            while (true)
            {
                long number = _last + 1;
                Reply reply;
                try
                {
                    reply = Once(kind, number, body, extra, clock);
                }
                catch (IOException)
                {
                    Drop();  // later bytes on this connection do not answer the next request
                    _unsure |= kind != "start";
                    if (!clock.Over && ++failures <= _client.Options.Retries)
                    {
                        clock.Sleep(RetryPauseMs * (failures - 1));  // the first retry is immediate: usually an idle connection was closed
                        continue;  // same number: it counts once
                    }
                    GiveUp(kind, number);
                    throw;
                }
                if (reply.Close) Drop();
                if (reply.Status == 200)
                {
                    _last = number;
                    return reply;
                }
                if (_unsure && reply.Status == 409 && kind != "start")
                {
                    if (reply.Error == "seq" && reply.Last >= 0) _last = reply.Last;
                    else if (reply.Error != "busy") return reply;
                    if (reply.Error == "busy" || rounds > 1) clock.Sleep(Math.Min(MaxBusyPauseMs, BusyPauseMs * (rounds + 1)));
                    rounds++;
                    if (clock.Over) throw new IOException("the request before is still being answered");
                    continue;
                }
                if (reply.NotNow)
                {
                    bool foreign = reply.Status >= 500 && !reply.Ours;  // from a proxy: the server may have received the request
                    _unsure |= foreign && kind != "start";
                    double pauseMs = (reply.RetryAfterSeconds ?? RetryPauseMs * (failures + 1) / 1000.0) * 1000;
                    if (++failures <= _client.Options.Retries && pauseMs < clock.LeftMs)
                    {
                        clock.Sleep((int)pauseMs);
                        continue;
                    }
                    if (foreign) GiveUp(kind, number);
                    if (foreign && reply.Status != 503)
                        throw new IOException("the answer was " + reply.Status + ", and not that of a Ludus server");
                }
                return reply;
            }
        }

        /// <summary>The request may have counted: do not use its number again, except for an end, which only an identical end may follow.</summary>
        void GiveUp(string kind, long number)
        {
            if (kind == "tick") _last = number;
        }

        Reply Once(string kind, long number, byte[] body, string extra, Clock clock)
        {
            if (_connection != null && !_connection.Usable) Drop();
            if (_connection == null) _connection = _client.Take(clock);
            string head = _head + "Ludus-Step: " + kind + "\r\nLudus-Seq: " + number.ToString(CultureInfo.InvariantCulture) + "\r\n"
                + extra + "Content-Length: " + body.Length.ToString(CultureInfo.InvariantCulture) + "\r\n\r\n";
            byte[] start = Encoding.UTF8.GetBytes(head);
            var request = new byte[start.Length + body.Length];
            Buffer.BlockCopy(start, 0, request, 0, start.Length);
            Buffer.BlockCopy(body, 0, request, start.Length, body.Length);
            return _connection.Ask(request, clock);
        }

        void Drop()
        {
            if (_connection != null) _connection.Dispose();
            _connection = null;
        }
    }

    // -- the raw format of the built-in actor -----------------------------------------------------------------------------

    /// <summary>
    /// Body of a raw tick, little-endian: reward, flags, the leaves of the observation in the order of GET /spec, the mask.
    /// Start such a session with the body RawWriter.Start.
    /// </summary>
    public sealed class RawWriter
    {
        const int Terminated = 1, Truncated = 2, Masked = 4;
        byte[] _bytes = new byte[256];
        int _size;
        bool[] _mask;

        /// <summary>Body of the start of a session with raw ticks.</summary>
        public static byte[] Start
        {
            get { return Encoding.ASCII.GetBytes("{\"format\": \"raw\"}"); }
        }

        /// <summary>Begin a tick. The reward belongs to the previous action; the mask has the allowed actions.</summary>
        public RawWriter Begin(float reward = 0, bool terminated = false, bool truncated = false, bool[] mask = null)
        {
            _size = 0;
            _mask = mask;
            Put(BitConverter.GetBytes(reward));
            return Put(BitConverter.GetBytes((terminated ? Terminated : 0) | (truncated ? Truncated : 0) | (mask != null ? Masked : 0)));
        }

        public RawWriter Float(float value) { return Put(BitConverter.GetBytes(value)); }
        public RawWriter Double(double value) { return Put(BitConverter.GetBytes(value)); }
        public RawWriter Int64(long value) { return Put(BitConverter.GetBytes(value)); }
        public RawWriter Int32(int value) { return Put(BitConverter.GetBytes(value)); }

        public RawWriter Byte(byte value)
        {
            Grow(1);
            _bytes[_size++] = value;
            return this;
        }

        public RawWriter Floats(params float[] values)
        {
            foreach (float value in values) Float(value);
            return this;
        }

        public RawWriter Int64s(params long[] values)
        {
            foreach (long value in values) Int64(value);
            return this;
        }

        /// <summary>uint8: pixels, MultiBinary.</summary>
        public RawWriter Bytes(byte[] values)
        {
            Grow(values.Length);
            System.Buffer.BlockCopy(values, 0, _bytes, _size, values.Length);
            _size += values.Length;
            return this;
        }

        public byte[] ToArray()
        {
            int options = _mask == null ? 0 : _mask.Length;
            var body = new byte[_size + options];
            System.Buffer.BlockCopy(_bytes, 0, body, 0, _size);
            for (int i = 0; i < options; i++) body[_size + i] = (byte)(_mask[i] ? 1 : 0);
            return body;
        }

        RawWriter Put(byte[] value)
        {
            if (!BitConverter.IsLittleEndian) Array.Reverse(value);
            return Bytes(value);
        }

        void Grow(int more)
        {
            if (_size + more > _bytes.Length) Array.Resize(ref _bytes, Math.Max(_size + more, _bytes.Length * 2));
        }
    }

    /// <summary>Leaves of an action, in the order of GET /spec. Discrete and MultiDiscrete are Int64, MultiBinary bytes.</summary>
    public sealed class RawReader
    {
        readonly byte[] _bytes;
        int _at;

        public RawReader(byte[] reply) { _bytes = reply; }

        /// <summary>No action: the episode is over.</summary>
        public bool Empty { get { return _bytes.Length == 0; } }
        public int Left { get { return _bytes.Length - _at; } }

        public float Float() { return BitConverter.ToSingle(Take(4), 0); }
        public double Double() { return BitConverter.ToDouble(Take(8), 0); }
        public long Int64() { return BitConverter.ToInt64(Take(8), 0); }
        public int Int32() { return BitConverter.ToInt32(Take(4), 0); }
        public byte Byte() { return Take(1)[0]; }

        public float[] Floats(int count)
        {
            var values = new float[count];
            for (int i = 0; i < count; i++) values[i] = Float();
            return values;
        }

        public long[] Int64s(int count)
        {
            var values = new long[count];
            for (int i = 0; i < count; i++) values[i] = Int64();
            return values;
        }

        byte[] Take(int size)
        {
            if (size > Left)
                throw new LudusException(0, "reply", "The reply has " + _bytes.Length + " bytes; " + size + " more are wanted after "
                    + _at + ".", "Compare what you read with GET /spec.");
            var part = new byte[size];
            System.Buffer.BlockCopy(_bytes, _at, part, 0, size);
            _at += size;
            if (!BitConverter.IsLittleEndian) Array.Reverse(part);
            return part;
        }
    }

    // -- HTTP/1.1 ---------------------------------------------------------------------------------------------------------

    /// <summary>Remaining time of a call.</summary>
    sealed class Clock
    {
        readonly Stopwatch _watch = Stopwatch.StartNew();
        readonly double _limitMs;

        public Clock(int limitMs) { _limitMs = limitMs; }

        public double LeftMs { get { return _limitMs - _watch.Elapsed.TotalMilliseconds; } }
        public bool Over { get { return LeftMs <= 0; } }

        /// <summary>For Socket.Poll, whose unit overflows after half an hour. Throws when the time is over.</summary>
        public int LeftMicroseconds()
        {
            double left = LeftMs;
            if (left <= 0) throw new IOException("timed out");
            return (int)Math.Min(Math.Ceiling(left * 1000), 1e9);
        }

        public void Sleep(int ms)
        {
            ms = (int)Math.Min(ms, Math.Ceiling(Math.Max(LeftMs, 0)));
            if (ms > 0) Thread.Sleep(ms);
        }
    }

    static class Header
    {
        public static string Checked(string what, string value, int maxBytes)
        {
            bool right = value.Length > 0 && value == value.Trim() && Encoding.UTF8.GetByteCount(value) <= maxBytes;
            foreach (char c in value) right = right && !char.IsControl(c);
            if (right) return value;
            throw new LudusException(0, "usage", "The " + what + " cannot be sent in a header.",
                "It is 1 to " + maxBytes + " bytes of UTF-8 without control characters.");
        }
    }

    sealed class Reply
    {
        public int Status;
        public byte[] Body;
        public double? RetryAfterSeconds;
        public bool Close;
        /// <summary>Whether a refusal has the JSON of a Ludus server, so that it is not from a proxy.</summary>
        public bool Ours;
        public string Error = "http", Message = "", Hint = "";
        public long Last = -1;

        /// <summary>A retry may help: the server is full, or a proxy cannot reach it.</summary>
        public bool NotNow
        {
            get { return Status == 429 || Status == 503 || (Status >= 500 && !Ours); }
        }

        public void ReadRefusal()
        {
            Message = "The server answered " + Status + ".";
            Dictionary<string, string> said = FlatJson.Read(Encoding.UTF8.GetString(Body, 0, Math.Min(Body.Length, 65536)));
            string word, message, hint, last;
            if (said == null || !said.TryGetValue("error", out word) || !said.TryGetValue("message", out message)) return;
            Ours = true;
            Error = word;
            Message = message;
            if (said.TryGetValue("hint", out hint)) Hint = hint;
            long number;
            if (said.TryGetValue("last", out last)
                && long.TryParse(last, NumberStyles.None, CultureInfo.InvariantCulture, out number) && number < long.MaxValue)
                Last = number;
        }

        public LudusException Refused()
        {
            bool lost = Ours && (Status == 410 || Status == 500 || Status == 504 || (Status == 404 && Error == "unknown_session"));
            if (lost) return new LudusSessionLost(Status, Error, Message, Hint);
            return new LudusRefused(Status, Error, Message, Hint, RetryAfterSeconds);
        }
    }

    /// <summary>Top-level strings and numbers of a JSON object; nested values are skipped. null: not an object.</summary>
    static class FlatJson
    {
        public static Dictionary<string, string> Read(string text)
        {
            var found = new Dictionary<string, string>();
            int at = 0;
            if (!Take(text, ref at, '{')) return null;
            if (Take(text, ref at, '}')) return found;
            while (true)
            {
                string key = ReadText(text, ref at);
                if (key == null || !Take(text, ref at, ':')) return null;
                Skip(text, ref at);
                if (at < text.Length && text[at] == '"')
                {
                    string value = ReadText(text, ref at);
                    if (value == null) return null;
                    found[key] = value;
                }
                else
                {
                    int begin = at;
                    if (!PassOver(text, ref at)) return null;
                    char first = text[begin];
                    if (first == '-' || (first >= '0' && first <= '9')) found[key] = text.Substring(begin, at - begin).Trim();
                }
                if (Take(text, ref at, '}')) return found;
                if (!Take(text, ref at, ',')) return null;
            }
        }

        static void Skip(string text, ref int at)
        {
            while (at < text.Length && (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t')) at++;
        }

        static bool Take(string text, ref int at, char wanted)
        {
            Skip(text, ref at);
            if (at >= text.Length || text[at] != wanted) return false;
            at++;
            return true;
        }

        /// <summary>Skip to the comma or bracket that ends the value. No recursion, so depth is not limited by the stack.</summary>
        static bool PassOver(string text, ref int at)
        {
            int depth = 0, begin = at;
            for (; at < text.Length; at++)
            {
                char c = text[at];
                if (c == '"')
                {
                    if (ReadText(text, ref at) == null) return false;
                    at--;
                }
                else if (c == '[' || c == '{') depth++;
                else if (depth == 0 && (c == ',' || c == '}' || c == ']')) return at > begin;
                else if (c == ']' || c == '}') depth--;
            }
            return false;
        }

        static string ReadText(string text, ref int at)
        {
            if (!Take(text, ref at, '"')) return null;
            var made = new StringBuilder();
            while (at < text.Length)
            {
                char c = text[at++];
                if (c == '"') return made.ToString();
                if (c != '\\')
                {
                    made.Append(c);
                    continue;
                }
                if (at >= text.Length) return null;
                char escaped = text[at++];
                int code;
                if (escaped != 'u')
                {
                    int which = "bfnrt".IndexOf(escaped);
                    made.Append(which < 0 ? escaped : "\b\f\n\r\t"[which]);
                }
                else if (at + 4 <= text.Length
                    && int.TryParse(text.Substring(at, 4), NumberStyles.AllowHexSpecifier, CultureInfo.InvariantCulture, out code))
                {
                    made.Append((char)code);
                    at += 4;
                }
                else return null;
            }
            return null;
        }
    }

    /// <summary>Address of the server and the headers that all requests share.</summary>
    sealed class Server
    {
        public readonly string Name, StepHead;
        readonly string _host, _path, _common;
        readonly int _port;
        readonly bool _tls;
        readonly LudusOptions _options;
        volatile IPAddress[] _addresses;

        public Server(string url, LudusOptions options)
        {
            Uri uri;
            if (!Uri.TryCreate(url, UriKind.Absolute, out uri) || (uri.Scheme != "http" && uri.Scheme != "https") || uri.Host.Length == 0
                || uri.Query.Length > 0 || uri.Fragment.Length > 0)
                throw new LudusException(0, "usage", "The url \"" + url + "\" does not name a server.", "It looks like http://127.0.0.1:8000.");
            _tls = uri.Scheme == "https";
            _host = uri.DnsSafeHost;
            _port = uri.Port;
            _path = uri.AbsolutePath.TrimEnd('/');
            _options = options;
            Name = _host + ":" + _port;
            _common = " HTTP/1.1\r\nHost: " + uri.Authority + "\r\n";
            if (options.Token != null) _common += "Authorization: Bearer " + Header.Checked("token", options.Token, 4096) + "\r\n";
            StepHead = "POST " + _path + "/step" + _common;
        }

        public byte[] Get(string page)
        {
            return Encoding.UTF8.GetBytes("GET " + _path + page + _common + "\r\n");
        }

        public Connection Connect(Clock clock)
        {
            IPAddress[] addresses = Addresses(clock);
            for (int i = 0; ; i++)
            {
                try
                {
                    return new Connection(addresses[i], _port, _tls ? _host : null, _options, clock);
                }
                catch (IOException)
                {
                    if (i + 1 < addresses.Length && !clock.Over) continue;
                    _addresses = null;  // the address may have changed
                    throw;
                }
            }
        }

        IPAddress[] Addresses(Clock clock)
        {
            IPAddress[] known = _addresses;
            if (known != null) return known;
            IPAddress literal;
            if (IPAddress.TryParse(_host, out literal)) known = new[] { literal };
            else
            {
                Task<IPAddress[]> asked = Dns.GetHostAddressesAsync(_host);
                try
                {
                    if (!asked.Wait((int)Math.Max(clock.LeftMs, 0))) throw new IOException("timed out");
                }
                catch (AggregateException error)
                {
                    throw new IOException("the host \"" + _host + "\" is not known", error.InnerException);
                }
                known = asked.Result;
                if (known.Length == 0) throw new IOException("the host \"" + _host + "\" is not known");
            }
            _addresses = known;
            return known;
        }

        public LudusUnreachable Unreachable(IOException error, int timeoutMs)
        {
            return new LudusUnreachable("unreachable", Name + " did not answer (" + timeoutMs + " ms): " + error.Message + ".",
                "Is it a Ludus server, and is it running?", error);
        }
    }

    /// <summary>One connection: a request, then its reply. Every failure is an IOException; dispose the connection then.</summary>
    sealed class Connection : IDisposable
    {
        const int MaxHead = 64 << 10;
        const int ChunkLineBytes = 256;

        readonly DeadlineStream _wire;
        readonly Stream _stream;
        readonly int _maxBody;
        readonly byte[] _buffer = new byte[16 << 10];
        int _from, _to;

        public Connection(IPAddress address, int port, string tlsHost, LudusOptions options, Clock clock)
        {
            _maxBody = options.MaxReplyBytes;
            _wire = new DeadlineStream(address, port, clock);
            _stream = _wire;
            if (tlsHost == null) return;
            var secure = new SslStream(_wire, false, options.CheckCertificate);
            try
            {
                secure.AuthenticateAsClient(tlsHost);
            }
            catch (Exception error) when (!(error is OutOfMemoryException))  // the exception types differ between runtimes
            {
                _wire.Dispose();
                throw error as IOException ?? new IOException("TLS failed: " + error.Message, error);
            }
            _stream = secure;
        }

        /// <summary>Nothing arrived since the last reply: neither unsolicited bytes nor the end of the stream.</summary>
        public bool Usable
        {
            get { return _from == _to && (_stream != _wire || !_wire.Readable); }  // TLS may send its own records at any time
        }

        public void Dispose()
        {
            _wire.Dispose();  // first, so that the TLS shutdown cannot block
            try { _stream.Dispose(); }
            catch (Exception error) when (error is IOException || error is ObjectDisposedException || error is InvalidOperationException) { }
        }

        public Reply Ask(byte[] request, Clock clock)
        {
            _wire.Clock = clock;
            bool early = false;
            try
            {
                if (_stream == _wire) early = !_wire.TryWrite(request);
                else _stream.Write(request, 0, request.Length);
                _stream.Flush();
                Reply reply = Read();
                reply.Close |= early;
                return reply;
            }
            catch (Exception error) when (error is SocketException || error is ObjectDisposedException || error is InvalidOperationException
                || error is NotSupportedException || error is AuthenticationException || error is AggregateException)
            {
                throw new IOException(error.Message, error);  // SslStream throws undocumented exception types
            }
        }

        Reply Read()
        {
            int headBytes = 0;
            while (true)
            {
                var reply = new Reply();
                string first = Line(ref headBytes, true);
                bool old = first.StartsWith("HTTP/1.0 ", StringComparison.Ordinal);
                if ((!old && !first.StartsWith("HTTP/1.1 ", StringComparison.Ordinal)) || !Status(first, out reply.Status))
                    throw new IOException("what came back is not HTTP/1.1");
                reply.Close = old;
                long length = Fields(reply, ref headBytes);
                if (reply.Status < 200) continue;  // 100 Continue; the total size of all heads is limited
                reply.Body = length == Chunked ? ReadChunks() : ReadBody(length);
                if (_from != _to) throw new IOException("more came back than was asked for");
                if (reply.Status != 200) reply.ReadRefusal();
                return reply;
            }
        }

        static bool Status(string first, out int status)
        {
            status = 0;
            if (first.Length < 12 || (first.Length > 12 && first[12] != ' ')) return false;
            for (int i = 9; i < 12; i++)
            {
                if (first[i] < '0' || first[i] > '9') return false;
                status = status * 10 + (first[i] - '0');
            }
            return status >= 100;
        }

        const long Chunked = -2, Unknown = -1;

        /// <summary>Read the rest of the head; return the length of the body.</summary>
        long Fields(Reply reply, ref int headBytes)
        {
            long length = Unknown;
            bool chunked = false;
            while (true)
            {
                string line = Line(ref headBytes, false);
                if (line.Length == 0) break;
                int colon = line.IndexOf(':');
                if (colon < 1) throw new IOException("a header came without a name");
                string name = line.Substring(0, colon).ToLowerInvariant(), value = line.Substring(colon + 1).Trim(' ', '\t');
                double seconds;
                switch (name)
                {
                    case "content-length":
                        long given;
                        if (value.Length > 18 || !long.TryParse(value, NumberStyles.None, CultureInfo.InvariantCulture, out given)
                            || (length != Unknown && length != given))
                            throw new IOException("the Content-Length is not usable");
                        if (given > _maxBody) throw new IOException("a reply of " + given + " bytes is too long");
                        length = given;
                        break;
                    case "transfer-encoding":
                        if (chunked || value.ToLowerInvariant() != "chunked") throw new IOException("the Transfer-Encoding is not chunked");
                        chunked = true;
                        break;
                    case "connection":
                        if (value.ToLowerInvariant() == "close") reply.Close = true;
                        break;
                    case "retry-after":
                        if (double.TryParse(value, NumberStyles.AllowDecimalPoint, CultureInfo.InvariantCulture, out seconds))
                            reply.RetryAfterSeconds = seconds;
                        break;
                }
            }
            if (chunked && length != Unknown) throw new IOException("a reply came with a length and in chunks");
            if (chunked) return Chunked;
            if (length != Unknown || reply.Status < 200) return length;
            if (reply.Status == 204 || reply.Status == 304) return 0;
            throw new IOException("a reply " + reply.Status + " came without a Content-Length");
        }

        byte[] ReadBody(long length)
        {
            // Grows with the received bytes, not with the announced length.
            var body = new byte[Math.Min(length, 64 << 10)];
            int have = 0;
            while (have < length)
            {
                if (have == body.Length) Array.Resize(ref body, (int)Math.Min(length, body.Length * 2L));
                have += ReadSome(body, have, body.Length - have);
            }
            return body;
        }

        byte[] ReadChunks()
        {
            var body = new MemoryStream();
            int trailers = 0;
            while (true)
            {
                int lineBytes = MaxHead - ChunkLineBytes;  // leaves this many bytes for the line
                string line = Line(ref lineBytes, false);
                int end = line.IndexOf(';');
                string digits = (end < 0 ? line : line.Substring(0, end)).TrimEnd(' ', '\t');
                long size;
                if (digits.Length > 8 || !long.TryParse(digits, NumberStyles.AllowHexSpecifier, CultureInfo.InvariantCulture, out size))
                    throw new IOException("the size of a chunk is not usable");
                if (size == 0) break;
                if (body.Length + size > _maxBody) throw new IOException("a reply of more than " + _maxBody + " bytes is too long");
                byte[] chunk = ReadBody(size);
                body.Write(chunk, 0, chunk.Length);
                if (Line(ref lineBytes, false).Length > 0) throw new IOException("a chunk is longer than its size");
            }
            while (Line(ref trailers, false).Length > 0) { }
            return body.ToArray();
        }

        /// <summary>Read a line without its CR LF, as Latin-1. `bytes` counts towards the limit of a head.</summary>
        string Line(ref int bytes, bool first)
        {
            const string Opening = "HTTP/1.";
            var line = new StringBuilder();
            while (true)
            {
                if (_from == _to) Fill();
                if (++bytes > MaxHead) throw new IOException("the headers of a reply are too long");
                char c = (char)_buffer[_from++];
                if (c == '\n')
                {
                    if (line.Length == 0 || line[line.Length - 1] != '\r') throw new IOException("what came back is not HTTP/1.1");
                    return line.ToString(0, line.Length - 1);
                }
                if (first && line.Length < Opening.Length && c != Opening[line.Length])
                    throw new IOException("what came back is not HTTP/1.1");
                line.Append(c);
            }
        }

        int ReadSome(byte[] into, int offset, int count)
        {
            if (_from == _to)
            {
                if (count >= _buffer.Length) return Received(_stream.Read(into, offset, count));
                Fill();
            }
            count = Math.Min(count, _to - _from);
            System.Buffer.BlockCopy(_buffer, _from, into, offset, count);
            _from += count;
            return count;
        }

        void Fill()
        {
            _from = _to = 0;
            _to = Received(_stream.Read(_buffer, 0, _buffer.Length));
        }

        static int Received(int count)
        {
            if (count <= 0) throw new IOException("the connection was closed by the server");
            return count;
        }
    }

    /// <summary>Socket whose waits all end with the time of the call, even if the peer sends slowly.</summary>
    sealed class DeadlineStream : Stream
    {
        readonly Socket _socket;
        public Clock Clock;

        public DeadlineStream(IPAddress address, int port, Clock clock)
        {
            Clock = clock;
            _socket = new Socket(address.AddressFamily, SocketType.Stream, ProtocolType.Tcp);
            try
            {
                _socket.Blocking = false;
                _socket.NoDelay = true;
                try
                {
                    _socket.Connect(new IPEndPoint(address, port));
                }
                catch (SocketException error) when (WouldBlock(error))
                {
                    AwaitConnected();
                }
            }
            catch (SocketException error)
            {
                _socket.Close();
                throw Broken(error);
            }
            catch
            {
                _socket.Close();
                throw;
            }
        }

        static bool WouldBlock(SocketException error)
        {
            return error.SocketErrorCode == SocketError.WouldBlock || error.SocketErrorCode == SocketError.InProgress
                || error.SocketErrorCode == SocketError.AlreadyInProgress || error.SocketErrorCode == SocketError.IOPending;
        }

        static IOException Broken(SocketException error)
        {
            return new IOException(
                error.SocketErrorCode == SocketError.ConnectionRefused ? "nothing listens there" : error.Message, error);
        }

        void AwaitConnected()
        {
            while (true)
            {
                int left = Math.Min(Clock.LeftMicroseconds(), SliceMicroseconds);
                if (_socket.Poll(left, SelectMode.SelectWrite)) break;
                if (_socket.Poll(0, SelectMode.SelectError)) break;  // Windows reports a refused connection here
            }
            var code = (int)_socket.GetSocketOption(SocketOptionLevel.Socket, SocketOptionName.Error);
            if (code != 0) throw new SocketException(code);
            if (!_socket.Connected)
            {
                try { _socket.Send(new byte[0]); }  // some runtimes detect it only on a send
                catch (SocketException error) when (WouldBlock(error)) { }
            }
        }

        public bool Readable
        {
            get
            {
                try
                {
                    return _socket.Poll(0, SelectMode.SelectRead);
                }
                catch (Exception error) when (error is SocketException || error is ObjectDisposedException)
                {
                    return true;
                }
            }
        }

        public override int Read(byte[] buffer, int offset, int count)
        {
            while (true)
            {
                if (!_socket.Poll(Clock.LeftMicroseconds(), SelectMode.SelectRead)) continue;
                try
                {
                    return _socket.Receive(buffer, offset, count, SocketFlags.None);
                }
                catch (SocketException error) when (WouldBlock(error)) { }
                catch (SocketException error)
                {
                    throw Broken(error);
                }
            }
        }

        // Mono sends everything or spins, regardless of Blocking. So send only as much at a time as a writable socket certainly
        // accepts: BSD's SO_SNDLOWAT is 2048; Linux requires a third of the buffer to be free, which is more.
        const int SendBytes = 2048;
        const int SliceMicroseconds = 5000;

        public override void Write(byte[] buffer, int offset, int count)
        {
            for (int end = offset + count; offset < end; )
                if (_socket.Poll(Clock.LeftMicroseconds(), SelectMode.SelectWrite)) offset += Send(buffer, offset, end - offset);
        }

        /// <summary>False if the server answers before it has received everything: it refuses the rest.</summary>
        public bool TryWrite(byte[] buffer)
        {
            for (int offset = 0; offset < buffer.Length; )
            {
                try
                {
                    if (_socket.Poll(Math.Min(Clock.LeftMicroseconds(), SliceMicroseconds), SelectMode.SelectWrite))
                        offset += Send(buffer, offset, buffer.Length - offset);
                    else if (Readable) return false;
                }
                catch (IOException)
                {
                    if (!Clock.Over && Readable) return false;
                    throw;
                }
            }
            return true;
        }

        int Send(byte[] buffer, int offset, int count)
        {
            try
            {
                return _socket.Send(buffer, offset, Math.Min(count, SendBytes), SocketFlags.None);
            }
            catch (SocketException error)
            {
                if (WouldBlock(error)) return 0;
                throw Broken(error);
            }
        }

        protected override void Dispose(bool disposing)
        {
            if (disposing) _socket.Close();
            base.Dispose(disposing);
        }

        public override void Flush() { }
        public override bool CanRead { get { return true; } }
        public override bool CanWrite { get { return true; } }
        public override bool CanSeek { get { return false; } }
        public override long Length { get { throw new NotSupportedException(); } }
        public override long Position
        {
            get { throw new NotSupportedException(); }
            set { throw new NotSupportedException(); }
        }
        public override long Seek(long offset, SeekOrigin origin) { throw new NotSupportedException(); }
        public override void SetLength(long value) { throw new NotSupportedException(); }
    }
}
